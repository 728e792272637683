"""`python -m torchneuron`: the command `torchneuron`."""

import sys

from torchneuron.cli import main

sys.exit(main())
