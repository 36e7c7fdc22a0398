"""`python -m slora_ref COMMAND`, the same as the installed `slora-ref COMMAND`."""

from __future__ import annotations

import sys

from slora_ref.cli import main

if __name__ == "__main__":
    sys.exit(main())
