"""The flags that the operator sets or answers for, and why a user may not set them behind its back.

Three kinds: flags that repeat a typed field (they may say the same), flags that are the operator's alone, and flags
that both roles must agree on. What a flag is called is vLLM's (`vllm/engine/arg_utils.py`); all spellings lead to the
names used here.
"""

from typing import Final

#: Flag -> field of a role, below `spec.prefill` or `spec.decode`, that says the same.
TYPED: Final[dict[str, str]] = {
    "--tensor-parallel-size": "parallelism.tensor",
    "--pipeline-parallel-size": "parallelism.pipeline",
    "--data-parallel-size": "parallelism.data",
    "--data-parallel-size-local": "parallelism.dataLocal",
    "--enable-expert-parallel": "parallelism.expert",
    "--decode-context-parallel-size": "parallelism.decodeContext",
    "--prefill-context-parallel-size": "parallelism.prefillContext",
    "--block-size": "blockSize",
    "--cp-kv-cache-interleave-size": "kvCacheInterleaveSize",
    "--dtype": "dtype",
    "--kv-cache-dtype": "kvCacheDtype",
    "--max-model-len": "maxModelLen",
}

#: The deprecated spelling of the interleave: it has a rule of its own.
DEPRECATED_INTERLEAVE: Final = "--dcp-kv-cache-interleave-size"

_ENDPOINT = "the probes, the router and the connector reach the engine at the address that the operator gives it"
_RANKS = "the operator decides how many ranks an engine has and where they run"
_CONNECTOR = "the operator connects prefill with decode, from spec.kvConnector"

#: Flag -> why it is the operator's alone.
OWNED: Final[dict[str, str]] = {
    "--kv-transfer-config": _CONNECTOR,
    "--kv-offloading-size": f"it would replace the connector; {_CONNECTOR}",
    "--kv-offloading-backend": f"it would replace the connector; {_CONNECTOR}",
    "--host": _ENDPOINT,
    "--port": _ENDPOINT,
    "--uds": _ENDPOINT,
    "--grpc": _ENDPOINT,
    "--grpc-port": _ENDPOINT,
    "--root-path": _ENDPOINT,
    "--ssl-keyfile": _ENDPOINT,
    "--ssl-certfile": _ENDPOINT,
    "--ssl-ca-certs": _ENDPOINT,
    "--ssl-cert-reqs": _ENDPOINT,
    "--ssl-ciphers": _ENDPOINT,
    "--enable-ssl-refresh": _ENDPOINT,
    "--api-key": "the router has no key to show to the engines, so every request would be refused",
    "--headless": _RANKS,
    "--nnodes": _RANKS,
    "--node-rank": _RANKS,
    "--master-addr": _RANKS,
    "--master-port": _RANKS,
    "--data-parallel-rank": _RANKS,
    "--data-parallel-start-rank": _RANKS,
    "--data-parallel-address": _RANKS,
    "--data-parallel-rpc-port": _RANKS,
    "--data-parallel-backend": _RANKS,
    "--data-parallel-hybrid-lb": _RANKS,
    "--data-parallel-external-lb": _RANKS,
    "--data-parallel-multi-port-external-lb": _RANKS,
    "--data-parallel-supervisor-port": _RANKS,
    "--shutdown-timeout": "the pod's termination grace period is reckoned from the value that the operator sets",
    "--config": "vLLM reads the file when it starts, and admission can't see it; state its arguments in extraArgs",
}

#: Flags by which the operator names the model, from spec.model.
MODEL: Final = ("--model", "--revision")

#: Flags without a typed field that change what a KV cache means: both roles must state the same.
SAME_MODEL: Final = (
    "--tokenizer",
    "--tokenizer-mode",
    "--tokenizer-revision",
    "--code-revision",
    "--trust-remote-code",
    "--hf-config-path",
    "--hf-overrides",
    "--config-format",
    "--load-format",
)

#: The same for number formats.
SAME_NUMBERS: Final = ("--quantization", "--kv-cache-dtype-skip-layers")
