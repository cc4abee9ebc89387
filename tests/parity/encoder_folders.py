"""Writes small random encoders in the formats of Wan's folders, by the libraries themselves."""

import numpy as np
import sentencepiece
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

SENTENCE = "a red square moves to the left and the right of a blue circle on grass"


def random_frames(frames, height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def as_video(frames):
    """[1, 3, T, H, W] from −1 to 1, as diffusers' processors make it of 8-bit pictures."""
    scaled = torch.from_numpy(frames.astype(np.float32) / 255.0).permute(3, 0, 1, 2)[None]
    return 2.0 * scaled - 1.0


def channels_last(latents):
    return latents[0].permute(1, 2, 3, 0).numpy()


def random_vae(kind, seed=0):
    """A tiny VAE of Wan 2.1 or 2.2, with random statistics of its latents."""
    torch.manual_seed(seed)
    channels = {"2.1": 16, "2.2": 48}[kind]
    options = {
        "z_dim": channels,
        "latents_mean": torch.randn(channels).tolist(),
        "latents_std": (torch.rand(channels) + 0.5).tolist(),
        "num_res_blocks": 1,
    }
    if kind == "2.1":
        return AutoencoderKLWan(base_dim=3, dim_mult=[1, 1, 2, 2], **options).eval()
    residual = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
    residual |= {"scale_factor_spatial": 16, "scale_factor_temporal": 4}
    return AutoencoderKLWan(
        base_dim=4, decoder_base_dim=6, dim_mult=[1, 2, 2, 2], **options, **residual
    ).eval()


def random_text_encoder(seed=0):
    torch.manual_seed(seed)
    config = UMT5Config(
        vocab_size=64, d_model=12, d_kv=4, d_ff=16, num_layers=2, num_heads=3, dropout_rate=0.1
    )
    return UMT5EncoderModel(config).eval()


def trained_tokenizer(folder):
    """A SentencePiece model of a few words in `folder`, read as Wan's tokenizer."""
    folder.mkdir(parents=True)
    words = SENTENCE.split()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(words[i:] + words[:i]) for i in range(len(words))),
        model_prefix=str(folder / "spiece"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )
    (folder / "spiece.vocab").unlink()
    return T5Tokenizer.from_pretrained(folder, extra_ids=0)


def random_image_encoder(seed=0):
    torch.manual_seed(seed)
    sizes = {"image_size": 28, "patch_size": 14, "projection_dim": 6}
    config = CLIPVisionConfig(
        hidden_size=10, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2, **sizes
    )
    return CLIPVisionModel(config).eval()


def image_processor():
    side = {"height": 28, "width": 28}
    return CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=side)


def write_pipeline(folder, kind="2.1"):
    """A folder with the subfolders that Wan's pipelines have; returns the parts."""
    parts = {
        "vae": random_vae(kind),
        "text_encoder": random_text_encoder(),
        "tokenizer": trained_tokenizer(folder / "spiece"),
        "image_encoder": random_image_encoder(),
        "image_processor": image_processor(),
    }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    return parts


def pipeline_of(parts, **others):
    """Diffusers' image-to-video pipeline of the parts, which also embeds texts."""
    names = ("tokenizer", "text_encoder", "image_encoder", "image_processor", "vae")
    others = {"scheduler": FlowMatchEulerDiscreteScheduler()} | others
    return WanImageToVideoPipeline(**{name: parts[name] for name in names} | others)
