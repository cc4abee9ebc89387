"""Writes small random encoders in the formats of HunyuanVideo's folders, by the libraries."""

import inspect

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_WIDTH, GLYPH_WIDTH, IMAGE_WIDTH = 12, 10, 8


def moved_from_zero(model):
    """The model with parameters none of which is 0 or 1."""
    with torch.no_grad():
        for part in model.parameters():
            part.add_(0.05 * torch.randn_like(part))
    return model.eval()


def random_vae(seed=0, **changes):
    torch.manual_seed(seed)
    options = {"latent_channels": 8, "block_out_channels": (8, 8, 8, 16, 16)}
    return moved_from_zero(
        AutoencoderKLHunyuanVideo15(**options | {"layers_per_block": 1} | changes)
    )


def random_language_model(tokenizer, seed=0):
    torch.manual_seed(seed)
    config = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]},
    )
    return moved_from_zero(Qwen2_5_VLTextModel(config))


def random_glyph_encoder(seed=0):
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=384, d_model=GLYPH_WIDTH, d_kv=4, d_ff=16, num_layers=2, num_heads=2
    )
    return moved_from_zero(T5EncoderModel(config))


def language_tokenizer():
    """Bytes, one word of more, and a conversation's marks, as Qwen's tokenizer has them.

    The system message has the 108 tokens of the released tokenizer: its beginning is one.
    """
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    defaults = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    message, count = (defaults[name].default for name in ("system_message", "crop_start"))
    around = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n"
    bytes_left = count - len(tokenizer(around).input_ids) - 1
    tokenizer.add_tokens([message[:-bytes_left]])
    return tokenizer


def byte_tokenizer(*marks):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "bl", "blu"])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[("b", "l"), ("bl", "u")])
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    return tokenizer


def write_pipeline_13b(folder):
    """A folder with the subfolders of the first HunyuanVideo's pipeline; returns the parts.

    What stands before a prompt has the 95 tokens of the released tokenizer, as above.
    """
    torch.manual_seed(0)
    tokenizer = byte_tokenizer("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    before, count = DEFAULT_PROMPT_TEMPLATE["template"].split("{}")[0], 95
    begin = before.index("Describe")
    surplus = len(tokenizer(before).input_ids) - count + 1
    ends = range(begin, len(before))
    end = next(n for n in ends if len(tokenizer(before[begin:n]).input_ids) == surplus)
    tokenizer.add_tokens([before[begin:end]])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(f"{a}</w>" for a in alphabet), "<|startoftext|>", "<|endoftext|>"]
    clip = CLIPTokenizer(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[])
    sizes = {"intermediate_size": 16, "num_attention_heads": 2}
    ids = {"bos_token_id": clip.bos_token_id, "eos_token_id": clip.eos_token_id}
    llama = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=TEXT_WIDTH, num_hidden_layers=4, **sizes
    )
    text = CLIPTextConfig(
        vocab_size=len(clip), hidden_size=GLYPH_WIDTH, num_hidden_layers=2, **sizes, **ids
    )
    widths = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    blocks = {"layers_per_block": 1, "scaling_factor": 0.5}
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        rope_axes_dim=(4, 2, 2),
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=TEXT_WIDTH,
        pooled_projection_dim=GLYPH_WIDTH,
    )
    parts = {
        "vae": moved_from_zero(AutoencoderKLHunyuanVideo(**widths, **blocks)),
        "text_encoder": moved_from_zero(LlamaModel(llama)),
        "tokenizer": tokenizer,
        "text_encoder_2": moved_from_zero(CLIPTextModel(text)),
        "tokenizer_2": clip,
        "transformer": moved_from_zero(transformer),
    }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    return parts


def random_image_encoder(seed=0):
    torch.manual_seed(seed)
    config = SiglipVisionConfig(
        hidden_size=IMAGE_WIDTH,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return moved_from_zero(SiglipVisionModel(config))


def write_pipeline(folder):
    """A folder with the subfolders that HunyuanVideo 1.5's pipelines have; returns the parts."""
    tokenizer = language_tokenizer()
    parts = {
        "vae": random_vae(),
        "text_encoder": random_language_model(tokenizer),
        "tokenizer": tokenizer,
        "text_encoder_2": random_glyph_encoder(),
        "tokenizer_2": ByT5Tokenizer(),
        "image_encoder": random_image_encoder(),
        "feature_extractor": SiglipImageProcessorPil(size={"height": 28, "width": 28}),
    }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    return parts


def random_transformer():
    """A transformer for the pipeline's encoders, whose timesteps and texts matter."""
    torch.manual_seed(1)
    return moved_from_zero(
        HunyuanVideo15Transformer3DModel(
            in_channels=17,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=8,
            rope_axes_dim=(4, 2, 2),
            num_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=TEXT_WIDTH,
            text_embed_2_dim=GLYPH_WIDTH,
            image_embed_dim=IMAGE_WIDTH,
            target_size=32,
        )
    )
