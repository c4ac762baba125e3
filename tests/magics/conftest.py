"""An IPython shell in this process, with the extension loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from rankscope.magics import load_ipython_extension, unload_ipython_extension


@pytest.fixture(scope="module")
def ipython(_module_leaves_nothing: None) -> Iterator[InteractiveShell]:
    """A shell that keeps no history file and no thread that would write one."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)
    load_ipython_extension(shell)
    yield shell
    unload_ipython_extension(shell)
    InteractiveShell.clear_instance()
