"""Property tests draw the same examples in every run of continuous integration, and new ones elsewhere."""

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("fixed")
