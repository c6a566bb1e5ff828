# SPDX-License-Identifier: Apache-2.0
"""`python -m kvpushd.mover`: see process."""

import sys

from kvpushd.mover.process import main

sys.exit(main())
