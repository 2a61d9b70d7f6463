"""``python -m feather_kernels.tune``."""

import sys

from feather_kernels.tune.cli import main

sys.exit(main())
