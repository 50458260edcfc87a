"""Files of another user, where tests may make some."""

import os

import pytest

ANOTHER = 54321  # a user who is not there
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
