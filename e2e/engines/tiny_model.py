"""Makes a random model that a CPU runs in milliseconds. Runs in the engine's Python:
`python tiny_model.py FOLDER [FAMILY [SEED [LAYERS [HIDDEN]]]]`. Models of one family and size have the same shapes.

Weights are drawn wide enough that greedy output is not one token for ever, so that a wrong page shows in it.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
}
"""Sizes of multi-head latent attention (MLA): of a token, kv_lora_rank + qk_rope_head_dim numbers are cached."""

FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 64}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 2, "head_dim": 64}),
    "minicpm3": (MiniCPM3Config, MiniCPM3ForCausalLM, LATENT),
}

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>"}
TEXT = ["engines share the pages of a prompt " * 8, "a page is found, verified, copied and used " * 8]


def tokenizer() -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=[*SPECIAL.values()], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **SPECIAL)


def main(folder: str, family: str = "qwen3", seed: str = "1", layers: str = "2", hidden: str = "256") -> None:
    words = tokenizer()
    words.save_pretrained(folder)
    torch.manual_seed(int(seed))
    make_config, make_model, attention = FAMILIES[family]
    config = make_config(
        vocab_size=len(words),
        hidden_size=int(hidden),
        intermediate_size=2 * int(hidden),
        num_hidden_layers=int(layers),
        num_attention_heads=int(hidden) // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **attention,
    )
    make_model(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
