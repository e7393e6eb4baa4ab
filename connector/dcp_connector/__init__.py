"""The KV connector: moves KV cache between any two valid layouts of prefill and decode ranks.

Importing this package loads neither torch, vllm nor mooncake.
"""
