"""A CPU worker that can be a pipeline stage: named by `--worker-cls`, and imported by engines alone.

A stage copies what it receives from the one before into tensors that vLLM 0.32 makes in its warm-up run. On CPU there
is no such run where nothing is compiled, and the first request would end the engine.
"""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StagedWorker(CPUWorker):
    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return times
