"""Checkpoints of one file, of several with an index, and behind symbolic links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support_checkpoint import same_bits, write_folder

from tiermem import CheckpointError, StorageError
from tiermem.storage.checkpoint.folder import CheckpointFiles

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def two_files() -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    first = {"a": torch.rand(3), "b": torch.randn(2, 2).to(torch.bfloat16)}
    return {ONE: first, TWO: {"c": torch.arange(5), "e": torch.ones(())}}


def check(path: Path, tensors: dict[str, torch.Tensor]) -> CheckpointFiles:
    files = CheckpointFiles.open(path)
    assert set(files.tensors) == set(tensors)
    assert all(same_bits(files.read_tensor(name), tensors[name]) for name in tensors)
    return files


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_a_folder_with_one_file(tmp_path: Path, stem: str) -> None:
    tensors = two_files()[ONE]
    save_file(tensors, tmp_path / f"{stem}.safetensors")
    assert check(tmp_path, tensors).paths == (tmp_path / f"{stem}.safetensors",)


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_a_folder_with_an_index(tmp_path: Path, stem: str) -> None:
    tensors = write_folder(tmp_path, two_files(), stem)
    files = check(tmp_path, tensors)
    assert files.paths == (tmp_path / ONE, tmp_path / TWO)
    assert [files.tensors[name].file for name in "abc"] == [0, 0, 1]
    assert files.metadata == {"format": "pt"}
    assert check(tmp_path / f"{stem}.safetensors.index.json", tensors).paths == files.paths


def test_which_of_a_file_and_an_index_counts(tmp_path: Path) -> None:
    """As transformers and diffusers choose."""
    for stem, counts in (("model", "one"), ("diffusion_pytorch_model", "c")):
        folder = tmp_path / stem
        write_folder(folder, two_files(), stem)
        save_file({"one": torch.ones(1)}, folder / f"{stem}.safetensors")
        assert counts in CheckpointFiles.open(folder).tensors


def test_a_relative_path_outlives_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a": torch.ones(2)}, "a.safetensors")
    files = CheckpointFiles.open("a.safetensors")
    monkeypatch.chdir("/")
    assert files.read_tensor("a").tolist() == [1, 1]


def test_links_into_a_cache(tmp_path: Path) -> None:
    """Snapshots of the Hugging Face cache are links to files that are named by their hash."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    tensors = write_folder(blobs, two_files())
    os.makedirs(snapshot)
    for number, name in enumerate([ONE, TWO, "model.safetensors.index.json"]):
        os.rename(blobs / name, blobs / f"hash{number}")
        os.symlink(f"../../blobs/hash{number}", snapshot / name)
    assert check(snapshot, tensors).paths == (snapshot / ONE, snapshot / TWO)
    os.symlink(snapshot, tmp_path / "main")
    check(tmp_path / "main", tensors)
    os.unlink(blobs / "hash1")
    with pytest.raises(CheckpointError, match=f"{TWO}: this link leads nowhere"):
        CheckpointFiles.open(snapshot)
    os.unlink(blobs / "hash2")
    with pytest.raises(CheckpointError, match=r"index\.json: this link leads nowhere"):
        CheckpointFiles.open(snapshot)


def test_a_tensor_that_only_its_file_names(tmp_path: Path) -> None:
    files = two_files()
    rest = {"a": ONE, "c": TWO}
    check(tmp_path, write_folder(tmp_path, files, weight_map=rest))
    # What no index names is not looked at.
    write_folder(tmp_path, files, weight_map={"a": ONE})
    assert set(CheckpointFiles.open(tmp_path).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("d", ONE, f"tensor 'd' is not in '{ONE}'"),
        ("c", ONE, f"tensor 'c' is in '{TWO}', not in '{ONE}'"),
        ("d", "model-3.safetensors", "model-3.safetensors: there is no such file"),
        ("d", "../other.safetensors", "tensor 'd' in '../other.safetensors', which is outside"),
        ("d", "x/../../other", "outside"),
        ("d", "/etc/passwd", "tensor 'd' in '/etc/passwd', which is outside"),
        ("d", "", "names no file for tensor 'd'"),
        ("d", "a\0b", "names no file for tensor 'd'"),
        ("d", 3, "names no file for tensor 'd'"),
        ("d", ".", "it is no file"),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, name: str, file: object, message: str) -> None:
    save_file({"d": torch.ones(1)}, tmp_path / "other.safetensors")
    folder = tmp_path / "folder"
    weight_map = {"a": ONE, "b": ONE, "c": TWO, "e": TWO, name: file}
    write_folder(folder, two_files(), weight_map=weight_map)
    with pytest.raises(CheckpointError, match=message):
        CheckpointFiles.open(folder)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    files = two_files()
    files[TWO]["a"] = torch.ones(1)
    write_folder(tmp_path, files)
    with pytest.raises(CheckpointError, match=f"tensor 'a' is in two files: .*{ONE} and .*{TWO}"):
        CheckpointFiles.open(tmp_path)
    os.unlink(tmp_path / TWO)
    os.symlink(ONE, tmp_path / TWO)
    with pytest.raises(CheckpointError, match="in two files"):
        CheckpointFiles.open(tmp_path)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", "no valid index: Expecting value"),
        (b"\xff", "no UTF-8"),
        (b"[]", "no object"),
        (b"{}", "'weight_map' names no tensors"),
        (b'{"weight_map": {}}', "'weight_map' names no tensors"),
        (b'{"weight_map": ["a"]}', "'weight_map' names no tensors"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "'a' comes twice"),
        (b'{"weight_map": {"\\ud800": "x"}}', "surrogate"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, written: bytes, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(written)
    with pytest.raises(CheckpointError, match=f"index.json: .*{message}"):
        CheckpointFiles.open(tmp_path)


def test_an_index_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.touch()
    os.truncate(path, 100_000_001)
    with pytest.raises(CheckpointError, match="100000001 bytes are no index"):
        CheckpointFiles.open(tmp_path)


def test_paths_that_lead_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        CheckpointFiles.open(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere: there is no such"):
        CheckpointFiles.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        CheckpointFiles.open("a\0b")
    with pytest.raises(CheckpointError, match=r"cannot be opened .File name too long"):
        CheckpointFiles.open("x" * 5000)
    os.mkdir(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: it is no file"):
        CheckpointFiles.open(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")  # without a writer
    with pytest.raises(CheckpointError, match="it is no file"):
        CheckpointFiles.open(tmp_path / "pipe.safetensors")


def test_a_folder_of_pickled_weights_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin .*save_pretrained"):
        CheckpointFiles.open(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def test_pointers_of_git_lfs_are_told_apart(tmp_path: Path) -> None:
    """In the place of a file, of one of several, and of their index."""
    write_folder(tmp_path, two_files())
    index = tmp_path / "model.safetensors.index.json"
    for path in (tmp_path / TWO, index, tmp_path / "model.safetensors"):
        path.write_text(POINTER)
        with pytest.raises(CheckpointError, match=f"{path.name}: .*pointer of Git LFS.*lfs pull"):
            CheckpointFiles.open(tmp_path)


def test_what_torch_saved_is_told_apart(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"torch\.save wrote it, .*save_file"):
        CheckpointFiles.open(tmp_path)


def test_files_of_an_index_that_are_missing_are_named_at_once(tmp_path: Path) -> None:
    write_folder(tmp_path, two_files())
    for name in (ONE, TWO):
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"names 2 files, and 2 .*{ONE}, .*{TWO}: .*download"):
        CheckpointFiles.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama.Q4_K.gguf", r"gguf_file='llama\.Q4_K\.gguf'"),
        ("consolidated.safetensors", r"It has 'consolidated\.safetensors': name one"),
        ("adapter_config.json", r"adapters on 'a/base': load that model .*load_adapters"),
        ("0_Transformer/model.safetensors", r"name one of them \(0_Transformer\)"),
        ("model.safetensors.incomplete", "or a safetensors file$"),
    ],
)
def test_what_a_folder_has_instead(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"base_model_name_or_path": "a/base"}')
    with pytest.raises(CheckpointError, match=said):
        CheckpointFiles.open(tmp_path)


def test_a_name_on_the_hub_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"llama/one: there is no .*snapshot_download"):
        CheckpointFiles.open("llama/one")


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_variants_are_named_and_read(tmp_path: Path, stem: str) -> None:
    tensors = write_folder(tmp_path / "several", two_files(), stem)
    index = tmp_path / "several" / f"{stem}.safetensors.index.json"
    index.rename(index.with_name(f"{stem}.safetensors.index.fp16.json"))
    one = tmp_path / "one" / f"{stem}.fp16.safetensors"
    one.parent.mkdir()
    save_file(two_files()[ONE], one)
    (one.parent / "pytorch_model.bin").touch()
    for path in (index.with_name(f"{stem}.safetensors.index.fp16.json"), one):
        with pytest.raises(CheckpointError, match=f"It has '{path.name}': name one of these"):
            CheckpointFiles.open(path.parent)
        assert CheckpointFiles.open(path.parent, "fp16").paths[0].parent == path.parent
        with pytest.raises(CheckpointError, match=r"has no model\.ema\.safetensors"):
            CheckpointFiles.open(path.parent, "ema")
    check(index.with_name(f"{stem}.safetensors.index.fp16.json"), tensors)
    check(one, two_files()[ONE])


def test_files_whose_index_is_missing(tmp_path: Path) -> None:
    write_folder(tmp_path, two_files(), "model")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=f"It has '{ONE}', of several, and no index"):
        CheckpointFiles.open(tmp_path)


def test_a_pipeline_is_told_its_models(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").touch()
    for name in ("unet", "scheduler", "vae"):
        (tmp_path / name).mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    write_folder(tmp_path / "vae", two_files(), "diffusion_pytorch_model")
    with pytest.raises(CheckpointError, match=r"of its models \(unet, vae\)$"):
        CheckpointFiles.open(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1)}, path)
    path.chmod(0)
    with pytest.raises(CheckpointError, match=r"cannot be opened .Permission denied"):
        CheckpointFiles.open(path)


def test_a_disk_that_fails_at_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1)}, path)

    def fail(*_: object) -> int:
        raise OSError(5, "no")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(
        StorageError, match=r"opening failed .errno 5.*: checkpoint, path .*a.safetensors"
    ):
        CheckpointFiles.open(path)


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="there is no tensor 'b'"):
        CheckpointFiles.open(tmp_path).read_tensor("b")


def test_changes_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4)}, path)
    files = CheckpointFiles.open(path)
    before = path.stat()
    fd = os.open(path, os.O_RDONLY)
    files.check_unchanged(fd, 0)

    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(
        StorageError, match=f"changed .*: it was written.*: checkpoint, path {path}"
    ):
        files.check_unchanged(fd, 0)
    os.truncate(path, before.st_size - 1)
    with pytest.raises(StorageError, match=f"had {before.st_size} bytes and has"):
        files.read_tensor("a")
    os.close(fd)

    save_file({"a": torch.zeros(4)}, tmp_path / "b.safetensors")
    os.replace(tmp_path / "b.safetensors", path)
    with pytest.raises(StorageError, match="leads to another file"):
        files.read_tensor("a")
    os.unlink(path)
    with pytest.raises(CheckpointError, match="there is no such file"):
        files.read_tensor("a")
