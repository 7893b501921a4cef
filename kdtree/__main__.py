"""`python -m kdtree`: the same as the `kdtree` command."""

from __future__ import annotations

import sys

from kdtree.cli import main

sys.exit(main())
