"""diffusers pipelines over tiers, of random tiny parts: called as ever, the resident bits."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermem
from tiermem.integrations.diffusers import offload

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # those libraries' own

BUDGETS: dict[str, Any] = {"device": "cpu", "hbm": "384KiB", "dram": "16MiB"}


def flux() -> Any:
    """A pipeline like Flux's: transformer, VAE and two text encoders."""
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    text = transformers.CLIPTextConfig(
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
        projection_dim=32,
        max_position_embeddings=16,
    )
    t5 = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4
    )
    vae = diffusers.AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=1,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=None,
        text_encoder_2=transformers.T5EncoderModel(t5),
        tokenizer_2=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    return pipe


def tokens() -> torch.Tensor:
    return torch.randint(100, (1, 8), generator=torch.Generator().manual_seed(2))


def picture(pipe: Any) -> torch.Tensor:
    """Encodes a prompt's tokens and denoises, as the pipeline does after its tokenizers."""
    with torch.no_grad():
        pooled = pipe.text_encoder(tokens()).pooler_output
        embeds = pipe.text_encoder_2(tokens())[0]
    result: torch.Tensor = pipe(
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
        height=8,
        width=8,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(1),
        output_type="pt",
    ).images
    return result


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return picture(flux())


def weights(pipe: Any) -> int:
    return sum(
        p.numel() * p.element_size()
        for component in pipe.components.values()
        if isinstance(component, torch.nn.Module)
        for p in component.parameters()
    )


def test_a_pipeline_gives_the_resident_picture(expected: torch.Tensor) -> None:
    pipe = flux()
    with offload(pipe, **BUDGETS) as tier:
        assert torch.equal(picture(pipe), expected)
        assert torch.equal(picture(pipe), expected)
        stats = tier.stats()
        assert stats.links["dram->hbm"].nbytes > 0
        assert stats.peak["hbm"] <= stats.budget["hbm"] < weights(pipe)
        models = {row.block.partition(".")[0].partition("#")[0] for row in tier.residency()}
        assert models >= {"FluxTransformer2DModel", "AutoencoderKL", "CLIPTextModel"}


def test_it_is_an_ordinary_pipeline_afterwards(expected: torch.Tensor) -> None:
    pipe = flux()
    with offload(pipe, **BUDGETS):
        pass
    assert torch.equal(picture(pipe), expected)
    with offload(pipe, **BUDGETS):
        assert torch.equal(picture(pipe), expected)


def with_lora(pipe: Any, folder: Path) -> torch.Tensor:
    pipe.load_lora_weights(str(folder), weight_name="lora.safetensors")
    pipe.set_adapters(["default_0"], [0.5])
    return picture(pipe)


def write_lora(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    pipe = flux()
    torch.manual_seed(3)
    pipe.transformer.add_adapter(
        peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    layers = peft.get_peft_model_state_dict(pipe.transformer)
    diffusers.FluxPipeline.save_lora_weights(
        folder, transformer_lora_layers=layers, weight_name="lora.safetensors"
    )


def test_lora_can_be_loaded_and_unloaded(tmp_path: Path, expected: torch.Tensor) -> None:
    write_lora(tmp_path)
    adapted = with_lora(flux(), tmp_path)
    assert not torch.equal(adapted, expected)
    pipe = flux()
    with offload(pipe, **BUDGETS):
        assert torch.equal(picture(pipe), expected)
        assert torch.equal(with_lora(pipe, tmp_path), adapted)
        pipe.unload_lora_weights()
        assert torch.equal(picture(pipe), expected)
    assert "load_lora_weights" not in pipe.__dict__


def test_it_was_offloaded_by_others_already() -> None:
    accelerate = pytest.importorskip("accelerate")
    pipe = flux()
    accelerate.cpu_offload(pipe.transformer, execution_device="cpu")
    with pytest.raises(tiermem.ConfigError, match="'transformer' is offloaded already"):
        offload(pipe, **BUDGETS)
    pipe = flux()
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        pipe.transformer, torch.device("cpu"), offload_type="leaf_level", num_blocks_per_group=1
    )
    with pytest.raises(tiermem.ConfigError, match="'transformer' is offloaded already"):
        offload(pipe, **BUDGETS)


@pytest.mark.parametrize(
    "name", ["enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"]
)
def test_offloading_by_others_meanwhile_is_refused(name: str, expected: torch.Tensor) -> None:
    pipe = flux()
    with offload(pipe, **BUDGETS):
        with pytest.raises(tiermem.ConfigError, match=rf"pipe\.{name}\(\): .* tiermem's tiers"):
            getattr(pipe, name)(torch.device("cpu"))
        with pytest.raises(tiermem.ConfigError, match=r"pipe\.transformer\.enable_group_offload"):
            pipe.transformer.enable_group_offload(torch.device("cpu"))
        assert torch.equal(picture(pipe), expected)
    assert name not in pipe.__dict__
    assert "enable_group_offload" not in pipe.transformer.__dict__


def test_layerwise_casting_meanwhile_is_refused_and_leaves_no_hook() -> None:
    pipe = flux()
    with offload(pipe, **BUDGETS):
        with pytest.raises(tiermem.ConfigError, match=r"pipe\.vae\.enable_layerwise_casting\(\)"):
            pipe.vae.enable_layerwise_casting(storage_dtype=torch.float16)
        assert not any(hasattr(module, "_diffusers_hook") for module in pipe.vae.modules())
    assert "enable_layerwise_casting" not in pipe.vae.__dict__


def test_layerwise_casting_is_refused_before_anything_moves() -> None:
    pipe = flux()
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float16)
    with pytest.raises(tiermem.ConfigError, match="'transformer' has layerwise casting"):
        offload(pipe, **BUDGETS)
    assert type(pipe.transformer.proj_out.weight) is torch.nn.Parameter


def stable_diffusion() -> Any:
    """A pipeline of convolutions, with a control network."""
    torch.manual_seed(0)
    sizes = {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "in_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
    }
    pipe = diffusers.StableDiffusionControlNetPipeline(
        unet=diffusers.UNet2DConditionModel(
            sample_size=32,
            out_channels=4,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            **sizes,
        ),
        controlnet=diffusers.ControlNetModel(conditioning_embedding_out_channels=(16, 32), **sizes),
        scheduler=diffusers.DDIMScheduler(),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        ),
        text_encoder=None,
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def controlled_picture(pipe: Any) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1)
    pipe.vae.enable_tiling()
    result: torch.Tensor = pipe(
        image=torch.randn(1, 3, 64, 64, generator=drawn),
        prompt_embeds=torch.randn(1, 8, 32, generator=drawn),
        negative_prompt_embeds=torch.randn(1, 8, 32, generator=drawn),
        height=64,
        width=64,
        num_inference_steps=2,
        generator=drawn,
        output_type="pt",
        callback_on_step_end=lambda pipe, step, time, values: {"latents": values["latents"] * 0.9},
    ).images
    return result


def test_convolutions_control_tiles_and_callbacks() -> None:
    expected = controlled_picture(stable_diffusion())
    pipe = stable_diffusion()
    with offload(pipe, **{**BUDGETS, "hbm": "1MiB"}) as tier:
        assert torch.equal(controlled_picture(pipe), expected)
        assert tier.stats().links["dram->hbm"].nbytes > 0


def half_stable_diffusion() -> Any:
    """A pipeline in float16 that gives its VAE float32 to decode, as SDXL's does."""
    torch.manual_seed(0)
    pipe = diffusers.StableDiffusionXLPipeline(
        unet=diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=4,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=80,
        ),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(16, 32),
            norm_num_groups=8,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(torch.float16)


def half_picture(pipe: Any) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1)
    result: torch.Tensor = pipe(
        prompt_embeds=torch.randn(1, 8, 32, generator=drawn).half(),
        negative_prompt_embeds=torch.randn(1, 8, 32, generator=drawn).half(),
        pooled_prompt_embeds=torch.randn(1, 32, generator=drawn).half(),
        negative_pooled_prompt_embeds=torch.randn(1, 32, generator=drawn).half(),
        height=16,
        width=16,
        num_inference_steps=2,
        generator=drawn,
        output_type="pt",
    ).images
    return result


@pytest.mark.parametrize("inference_mode", [False, True])
def test_a_pipeline_gives_its_vae_another_dtype(inference_mode: bool) -> None:
    expected = half_picture(half_stable_diffusion())
    pipe = half_stable_diffusion()
    assert pipe.vae.config.force_upcast
    with offload(pipe, device="cpu", hbm="384KiB", dram="16MiB") as tier:
        with torch.inference_mode(inference_mode):
            for _ in range(2):
                assert torch.equal(half_picture(pipe), expected)
                assert pipe.vae.dtype is torch.float16
        assert any(row.block.startswith("AutoencoderKL") for row in tier.residency())
    assert torch.equal(half_picture(pipe), expected)
    assert not {"to", "half", "enable_group_offload"} & pipe.vae.__dict__.keys()


def test_a_pipeline_becomes_another_dtype() -> None:
    expected = half_picture(half_stable_diffusion())
    pipe = half_stable_diffusion()
    pipe.to(torch.float32)
    pipe.vae.half()
    pipe.unet.half()
    pipe.vae.float()
    with offload(pipe, device="cpu", hbm="768KiB", dram="16MiB"):
        pipe.to("cpu", torch.float16)
        assert torch.equal(half_picture(pipe), expected)
        assert pipe.vae.float() is pipe.vae
        assert pipe.vae.float().dtype is torch.float32
        with pytest.raises(tiermem.ParameterError, match="do that before"):
            pipe.to("meta", torch.float16)
        assert torch.equal(half_picture(pipe.to(torch.float16)), expected)


def test_a_dtype_without_room_is_refused_and_the_model_is_as_it_was() -> None:
    expected = half_picture(half_stable_diffusion())
    pipe = half_stable_diffusion()
    for param in pipe.vae.decoder.mid_block.parameters():
        param.data = param.data.bfloat16()
    dtypes = [param.dtype for param in pipe.vae.parameters()]
    with offload(pipe, device="cpu", hbm="384KiB", dram=weights(pipe) + (256 << 10)) as tier:
        with pytest.raises(
            tiermem.CapacityError, match=r"'vae' has no room in tiers as torch\.float64"
        ):
            pipe.vae.double()
        assert [param.dtype for param in pipe.vae.parameters()] == dtypes
        assert any(row.block.startswith("AutoencoderKL") for row in tier.residency())
        pipe.vae.half()
    pipe.vae.load_state_dict(half_stable_diffusion().vae.state_dict())
    assert torch.equal(half_picture(pipe), expected)


def test_a_model_becomes_another_memory_format() -> None:
    pipe = half_stable_diffusion()
    pipe.unet.to(memory_format=torch.channels_last)
    expected = half_picture(pipe)
    pipe = half_stable_diffusion()
    with offload(pipe, device="cpu", hbm="384KiB", dram="16MiB") as tier:
        assert pipe.unet.to(memory_format=torch.channels_last) is pipe.unet
        assert torch.equal(half_picture(pipe), expected)
        assert any(row.block.startswith("UNet2DConditionModel") for row in tier.residency())
    assert pipe.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert not pipe.unet.conv_in.weight.is_contiguous()


def test_copies_and_pickles_of_its_models_are_ordinary_ones(expected: torch.Tensor) -> None:
    pipe = flux()
    with offload(pipe, **BUDGETS):
        file = io.BytesIO()
        torch.save(pipe.vae, file)
        file.seek(0)
        for other in (copy.deepcopy(pipe.vae), torch.load(file, weights_only=False)):
            for one, same in zip(other.parameters(), flux().vae.parameters(), strict=True):
                assert torch.equal(one, same)
            other.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
            assert other.half().dtype is torch.float16
        assert pipe.vae.dtype is torch.float32
        assert torch.equal(picture(pipe), expected)


def test_what_is_no_pipeline_is_refused() -> None:
    with pytest.raises(tiermem.ConfigError, match="no diffusers pipeline"):
        offload(torch.nn.Linear(2, 2), **BUDGETS)


def test_a_budget_that_cannot_work_leaves_the_pipeline_as_it_was(expected: torch.Tensor) -> None:
    pipe = flux()
    with pytest.raises(tiermem.CapacityError, match="give dram= at least"):
        offload(pipe, **{**BUDGETS, "dram": "64KiB"})
    assert torch.equal(picture(pipe), expected)
