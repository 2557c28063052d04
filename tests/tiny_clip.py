"""A tiny CLIP in a folder, for tests that read one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WORDS = ["a", "c", "t", "a</w>", "c</w>", "t</w>", "ca", "cat</w>"]


def write_clip(folder, eos):
    """A tiny random CLIP with its processor: 2 layers of width 16, images of 8 pixels, texts of 10 tokens."""
    vocabulary = {word: place for place, word in enumerate([*WORDS, "<|startoftext|>", "<|endoftext|>"])}
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    layers |= {"attention_dropout": 0.5}
    ends = {"bos_token_id": 8, "eos_token_id": eos, "pad_token_id": 9}
    config = transformers.CLIPConfig(
        text_config={**layers, **ends, "vocab_size": 10, "max_position_embeddings": 10},
        vision_config={**layers, "image_size": 8, "patch_size": 4},
        projection_dim=6,
    )
    torch.manual_seed(1)
    model = transformers.CLIPModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[("c", "a"), ("ca", "t</w>")])
    image_processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = transformers.CLIPProcessor(image_processor, tokenizer)
    processor.save_pretrained(folder)
    return model, processor
