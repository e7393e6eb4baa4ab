"""vLLM on CPU for tests and the demo: its environment, its tiny models, and how an engine is started."""

from devcluster.engine.environment import ensure_engine_environment, ensure_models

__all__ = ["ensure_engine_environment", "ensure_models"]
