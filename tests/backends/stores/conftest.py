"""The stores, each as a site that a test opens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.backends.stores.base import Store
from tests.backends.stores.sites import CLONE, CONNECT, Site, open_site


@pytest.fixture(params=[*CONNECT, *CLONE])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    yield from open_site(request.param, tmp_path)


@pytest.fixture(params=list(CONNECT))
def far_site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A store that other processes reach as well."""
    yield from open_site(request.param, tmp_path)


@pytest.fixture
def store(site: Site) -> Store:
    return site.open()
