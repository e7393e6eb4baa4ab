"""What a flag's value means: numbers as vLLM reads them, switches, and names of number formats."""

from dcp_operator.flags import AUTO, BadValueError, Flag, flag_value

__all__ = ["AUTO", "BadValueError", "dtype", "flag_value", "kv_cache_dtype", "same_value", "written"]

#: Names for one number format -> the name that stands for them.
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_KV_DTYPE_ALIASES = {"fp8_e4m3": "fp8"}


def same_value(name: str, said: object, stated: object) -> bool:
    """Whether a flag says the same as a field, other names for the same format included."""
    if name == "--dtype":
        return dtype(str(said)) == dtype(str(stated))
    if name == "--kv-cache-dtype":
        return kv_cache_dtype(str(said)) == kv_cache_dtype(str(stated))
    return said == stated


def dtype(name: str | None) -> str:
    """Return the one name of a data type; absent means auto."""
    return _DTYPE_ALIASES.get(name or AUTO, name or AUTO)


def kv_cache_dtype(name: str | None) -> str:
    """Return the one name of a KV-cache data type; absent means auto."""
    return _KV_DTYPE_ALIASES.get(name or AUTO, name or AUTO)


def written(flag: Flag, *, full: bool = False) -> str:
    """Return a flag as the user wrote it, with its full name where it was abbreviated."""
    plain = flag.spelling.replace("_", "-")
    if plain in (flag.name, f"--no-{flag.name[2:]}") or (not full and plain.startswith(f"{flag.name}.")):
        return flag.spelling
    return f"{flag.spelling} ({flag.name})"
