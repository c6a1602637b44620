"""``python -m polestar_jax VERB``: the same as ``polestar VERB``."""

import sys

from polestar_jax.cli import main

sys.exit(main())
