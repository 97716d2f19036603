"""Import every module of hub, node and shared, and report those that need a library that is not installed.

    python -W error -m scripts.ci.import_all

Libraries of extras (`OPTIONAL`) may be missing; a module that needs one is skipped and counted. Any other failure, a
warning included, makes the exit status 1; the remaining modules are still tried.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from collections import Counter
from typing import Final

PACKAGES: Final = ("echo_shared", "echo_node", "echo_hub")
OPTIONAL: Final = frozenset(
    {
        "bitsandbytes",
        "gguf",
        "llama_cpp",
        "mlx",
        "mlx_lm",
        "nats",
        "peft",
        "pyarrow",
        "pystray",
        "ray",
        "textarena",
        "torch",
        "vllm",
        "wandb",
    }
)
"""Top-level packages that may be missing, because node and hub also run without them: those of extras, and those that
only the interpreter of the setting sessions.python has.
"""


def main() -> None:
    """Import all modules. Raises SystemExit with the names of the modules that fail."""
    skipped: Counter[str] = Counter()
    failed: list[str] = []
    names = [name for package in PACKAGES for name in _modules_of(package)]
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in OPTIONAL:
                skipped[missing] += 1
            else:
                failed.append(name)
                traceback.print_exc()
        except Exception:  # noqa: BLE001  # Print any error and try the next module.
            failed.append(name)
            traceback.print_exc()
    needs = ", ".join(f"{count} without {library}" for library, count in skipped.items())
    print(f"{len(names) - len(failed) - skipped.total()} modules imported; skipped: {needs or 'none'}")
    if failed:
        sys.exit(f"cannot be imported: {', '.join(failed)}")


def _modules_of(package: str) -> list[str]:
    found = importlib.import_module(package)
    below = (one.name for one in pkgutil.walk_packages(found.__path__, prefix=f"{package}."))
    return [package, *(name for name in below if not name.endswith(".__main__"))]


if __name__ == "__main__":
    main()
