"""Parts that behave as their names say."""

from __future__ import annotations

import sys
import threading

if __name__ == "__main__":
    print("output of a library")
    match sys.argv[1]:
        case "raises":
            raise ValueError("no memory")
        case "hangs":
            threading.Event().wait()
    print('{"a": 1}')
