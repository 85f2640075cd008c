"""Tries whatever models the installed transformers, diffusers and torch have, and counts.

``python tests/sweep_architectures.py --seconds 600 --seed 1`` takes classes of transformers' auto
mappings, the most used kinds first and each in an order drawn at random, with random weights from
their default configuration made small. Each is compared bit for bit with the plain model, in a
process of its own: forward passes, ``generate``, three steps of AdamW, ``state_dict`` and closing
(part ``wrap``); ``load_checkpoint`` beside ``from_pretrained`` (``load``); and a step of adapters
beside peft (``lora``), on peft's own choice of modules, or on all linear layers where it has none.
Part ``ways`` trains adapters in several dtypes, with several optimizers and with gradient
checkpointing. ``--only llama`` tries the classes with that in their name; ``--kinds torch
diffusers`` modules of torch in odd shapes and models of diffusers. ``--device cuda`` runs all
of them on a GPU, plain ones too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

warnings.simplefilter("ignore")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that children may use the GPU
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "critical"

import support_sweep  # noqa: E402
import transformers  # noqa: E402
from support_process import beside_each_other  # noqa: E402
from support_sweep import Case, of_diffusers, of_torch, of_transformers, try_case  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

KINDS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "TEXT_TO_WAVEFORM",
    "MASK_GENERATION",
    "",
)
"""Kinds of transformers' mappings in the order in which they are tried; then come the others."""


def listed(kinds: list[str], rng: random.Random) -> list[Case]:
    """Returns the cases of some kinds, each class once."""
    cases: list[Case] = []
    if "torch" in kinds or not kinds:
        cases += of_torch()
    if "diffusers" in kinds or not kinds:
        cases += of_diffusers()
    names = [name[6:-14] for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")]
    kind_of = {name.removeprefix("FOR_"): name for name in names if name.startswith("FOR_")}
    kind_of[""] = ""
    order = [kind for kind in KINDS if kind in kind_of]
    order += sorted(kind_of.keys() - set(order))
    seen: set[str] = set()
    for kind in order:
        if kinds and (kind or "BASE") not in kinds:
            continue
        mapping = f"MODEL_{kind_of[kind]}_MAPPING_NAMES".replace("__", "_")
        pairs = sorted(getattr(modeling_auto, mapping, {}).items(), key=str)
        rng.shuffle(pairs)
        for model_type, found in pairs:
            for name in [found] if isinstance(found, str) else found:
                if name not in seen:
                    seen.add(name)
                    cases.append(of_transformers(kind or "BASE", model_type, name))
    return cases


def tried(case: Case, parts: list[str], limit: float, folder: Path) -> dict[str, Any]:
    """Tries a case in a child; returns what came of each part."""
    found = folder / f"{os.getpid()}-{random.getrandbits(40):x}"
    log = sys.stdout
    log.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            out: dict[str, Any] = {}
            try:
                for part, what in try_case(case, parts, found.with_suffix(".d")):
                    out[part] = what
                    found.write_text(json.dumps(out))
            except BaseException as error:
                out["sweep"] = {
                    "kind": "failed",
                    "why": f"{type(error).__name__}: {error}"[:300],
                    "trace": traceback.format_exc()[-3000:],
                }
            found.write_text(json.dumps(out))
        finally:
            os._exit(0)
    deadline = time.monotonic() + limit
    done = 0
    while not done and time.monotonic() < deadline:
        done, _ = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if not done:
        os.kill(pid, signal.SIGKILL)
        _, _ = os.waitpid(pid, 0)
    shutil.rmtree(found.with_suffix(".d"), ignore_errors=True)
    written = found.exists()  # in the end at least, where no part is for this case
    out = json.loads(found.read_text()) if written else {}
    if not done or not written:
        out["sweep"] = {"kind": "time" if not done else "died", "why": f"after {list(out)}"}
    return out


def warm(device: torch.device) -> None:
    """Imports what every child would, which takes seconds; no backward, as its threads stay."""
    import peft

    small = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    for made_on in ("meta", "cpu"):
        with torch.device(made_on):
            model = transformers.LlamaForCausalLM(small)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=1))
    torch.optim.AdamW(adapted.parameters())
    if device.type == "cpu":  # it looks at the GPU, which no child could use then
        model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=1)


def main() -> int:
    """Runs the sweep; returns 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=[], help="CAUSAL_LM, BASE, torch, ...")
    parser.add_argument("--only", nargs="*", default=[], help="names, or parts of them")
    parser.add_argument("--parts", nargs="*", default=["wrap", "load", "lora"])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default="0/1", help="which of the cases: 1/4 is every fourth")
    parser.add_argument("--jobs", type=int, default=1, help="sweeps at a time")
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cpu"), help="cuda, say"
    )
    parser.add_argument(
        "--log", type=Path, help="file to which outcomes are added; goes on after it"
    )
    args = parser.parse_args()
    if args.jobs > 1:
        shares = [f"{number}/{args.jobs}" for number in range(args.jobs)]
        return beside_each_other([*sys.argv, "--jobs", "1", "--share", share] for share in shares)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warm(args.device)
    support_sweep.device = args.device
    share, of = map(int, args.share.split("/"))
    cases = listed(args.kinds, random.Random(args.seed))
    cases = [
        c for c in cases if not args.only or any(o.lower() in c.name.lower() for o in args.only)
    ]
    if args.log and args.log.exists():
        done = {json.loads(line)["case"] for line in args.log.read_text().splitlines()}
        cases = [case for case in cases if case.name not in done]
    counts: dict[str, Counter[str]] = {}
    folder = Path(tempfile.mkdtemp())
    until = time.monotonic() + args.seconds
    left = 0
    for case in cases[share::of]:
        if time.monotonic() > until:
            left += 1
            continue
        began = time.monotonic()
        out = tried(case, args.parts, args.limit, folder)
        for part, what in out.items():
            counts.setdefault(part, Counter())[what["kind"]] += 1
            if args.log:
                with args.log.open("a") as log:
                    seconds = round(time.monotonic() - began, 1)
                    row = {"case": case.name, "group": case.group, "part": part, "s": seconds}
                    log.write(json.dumps({**row, **what}) + "\n")
            if what["kind"] != "same":
                print(f"{case.group} {case.name} {part}: {what['kind']}: {what['why']}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    for part, outcomes in counts.items():
        print(f"{part:8}", ", ".join(f"{kind} {n}" for kind, n in sorted(outcomes.items())))
    print(f"{len(cases[share::of]) - left} classes tried, {left} left; seed {args.seed}")
    bad = {"failed", "died", "differs", "refused", "time"}
    return min(1, sum(n for c in counts.values() for kind, n in c.items() if kind in bad))


if __name__ == "__main__":
    sys.exit(main())
