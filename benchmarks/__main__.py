"""The command line of the benchmarks: ``python benchmarks``."""

import sys

from commands import main

sys.exit(main())
