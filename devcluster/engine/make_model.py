"""Make a tiny Llama with fixed random weights, for engines on CPU. Runs with the engine environment's interpreter.

    python make_model.py FOLDER --kv-heads 1

The model is as small as the geometry allows: 8 query heads of 32, 4 layers, a byte-level tokenizer (a token is a byte,
so a prompt of n ASCII characters has n tokens). The weights are real ones on disk because vLLM's dummy weights differ
between tensor-parallel sizes. They come from NumPy's PCG64, whose stream is fixed for a seed.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS, HEADS, HEAD_DIM, INTERMEDIATE = 4, 8, 32, 512
HIDDEN = HEADS * HEAD_DIM
MAX_POSITIONS = 4096
BOS, EOS = 256, 257
VOCABULARY = 258

# Gains over 1/sqrt(fan in), found by trial: queries and keys large enough for attention to prefer some tokens to
# others, and its output large enough beside the residual stream for a lost token to change what is said.
QK_GAIN, VALUE_GAIN, MLP_GAIN = 1.6, 1.6, 1.0


def tokenizer() -> tuple[Tokenizer, list[int]]:
    """Return a byte-level tokenizer, and the token ids of the printable ASCII characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    result = Tokenizer(models.BPE(vocab=vocabulary | {"<s>": BOS, "</s>": EOS}, merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.decoder = decoders.ByteLevel()
    printable = [result.encode(chr(code)).ids[0] for code in range(32, 127)]
    return result, printable


def weights(kv_heads: int, printable: list[int]) -> dict[str, np.ndarray]:
    """Return the tensors by name, float32, as `LlamaForCausalLM` lays them out: `[out, in]`."""
    generator = np.random.Generator(np.random.PCG64(20 + kv_heads))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, np.sqrt(HIDDEN)), "model.norm.weight": ones}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN, QK_GAIN),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads * HEAD_DIM, HIDDEN, QK_GAIN),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads * HEAD_DIM, HIDDEN, VALUE_GAIN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN, VALUE_GAIN),
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN, MLP_GAIN),
            f"{prefix}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN, MLP_GAIN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE, MLP_GAIN),
        }
    # Only printable characters can be said: their logits are random, all others are 0 and lose to the best of 95.
    # Completions can then be shown on a terminal, and never stop early.
    head = np.zeros((VOCABULARY, HIDDEN), dtype=np.float32)
    head[printable] = matrix(len(printable), HIDDEN, 4.0)
    return tensors | {"lm_head.weight": head}


def config(kv_heads: int) -> dict[str, object]:
    """Return config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


def main() -> None:
    """Write the model into a folder that exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kv-heads", type=int, required=True)
    arguments = parser.parse_args()
    made, printable = tokenizer()
    made.save(str(arguments.folder / "tokenizer.json"))
    files = {
        "config.json": config(arguments.kv_heads),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": MAX_POSITIONS,
        },
    }
    for name, content in files.items():
        (arguments.folder / name).write_text(json.dumps(content, indent=2) + "\n")
    save_file(weights(arguments.kv_heads, printable), arguments.folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
