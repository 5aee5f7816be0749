"""The command line of the benchmarks: ``python benchmarks``, in a checkout that need not be
installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

# by a link of its own: what else lies beside it must not hide packages of others
if find_spec("commpress") is None:
    root = Path(__file__).resolve().parents[1]
    link = root / "build" / "path" / "commpress"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(root / "commpress")
    sys.path.append(str(link.parent))

from commands import main

sys.exit(main())
