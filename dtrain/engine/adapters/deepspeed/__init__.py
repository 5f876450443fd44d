from dtrain.engine.adapters.deepspeed.engine import build

__all__ = ["build"]
