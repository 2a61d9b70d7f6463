"""The Chunked Hash Tree beside the paper's C++ (table 5.1) and SGLang's lpm and dfs-weight (figure 5.9).

Same as ``feather bench cht``; flags as there. Figures of a run: docs/lab/costs.md.
"""

import sys

from feather_sglang.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "cht", *sys.argv[1:]]))
