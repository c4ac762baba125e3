"""DeviceMesh: the ranks as an array, with a group along each of its dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..devices.arrays import is_device_type
from ..quantities import as_int, as_ints
from ..rank_sets import name_ranks
from .api import init_process_group
from .membership import is_initialized, resolve_group
from .process_group import ProcessGroup
from .spec import NON_GROUP_MEMBER, NonGroupMember
from .subgroups import new_group
from .world import DEFAULT, world

__all__ = ["DeviceMesh", "init_device_mesh"]

_Group = ProcessGroup | NonGroupMember


class DeviceMesh:
    """The global ranks in an n-dimensional array, and a group along each dimension.

    Parameters
    ----------
    device_type : str
        The device type of the arrays, ``"cpu"`` or ``"cuda"``, without an index.
    mesh : array_like of int
        The global ranks, each once, not necessarily all. Every rank of the world gives
        the same.
    mesh_dim_names : sequence of str, optional
        A name for each dimension. Messages and the board show it as the name of the
        dimension's groups.
    backend_override : dict, optional
        Number or name of a dimension → the backend string of its groups, or a pair of
        it and options, which are not used. The default is the default group's.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong. No group was made.

    Notes
    -----
    Named after ``torch.distributed.DeviceMesh``. Without a default group it is made, as
    by ``init_process_group()``. On a rank that is not in `mesh`, `get_coordinate` is
    ``None`` and the groups are ``GroupMember.NON_GROUP_MEMBER``.

    Examples
    --------
    >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    >>> mesh.shape, mesh.get_coordinate()
    ((1, 1), (0, 0))
    >>> mesh.get_group("tp").group_desc
    'tp'
    >>> mesh["tp"]
    DeviceMesh('cpu', [0], mesh_dim_names=('tp',))
    """

    #: The device type of the arrays, such as ``"cpu"``.
    device_type: str
    #: The global ranks, an array that cannot be written.
    mesh: Any
    #: The names of the dimensions, or ``None``.
    mesh_dim_names: tuple[str, ...] | None

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, Any] | None = None,
    ) -> None:
        _check_device(device_type)
        ranks = _as_mesh(mesh)
        names = _as_names(mesh_dim_names, ranks.ndim)
        backends = _as_backends(backend_override, ranks.ndim, names)
        if not is_initialized():
            init_process_group()
        size = world.get_group(DEFAULT).size()
        if ranks.min() < 0 or ranks.max() >= size:
            raise ValueError(
                f"DeviceMesh on rank {world.rank}: mesh has "
                f"{name_ranks(_flat(ranks))}; expected global ranks from 0 to "
                f"{size - 1}"
            )
        groups = [
            _new_group_along(ranks, dim, names[dim] if names else None, backends[dim])
            for dim in range(ranks.ndim)
        ]
        self._set(device_type, ranks, names, groups, None)

    def _set(
        self,
        device_type: str,
        ranks: Any,
        names: tuple[str, ...] | None,
        groups: Sequence[_Group],
        root: DeviceMesh | None,
    ) -> None:
        self.device_type = device_type
        self.mesh = ranks
        ranks.flags.writeable = False
        self.mesh_dim_names = names
        self._groups = list(groups)
        self._root = root
        # The flattened meshes of a root, by name.
        self._flattened: dict[str, DeviceMesh] = {}
        here = np.argwhere(ranks == world.rank)
        self._coordinate = tuple(here[0].tolist()) if len(here) else None

    @classmethod
    def _made(cls, *parts: Any) -> DeviceMesh:
        mesh = cls.__new__(cls)
        mesh._set(*parts)
        return mesh

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return the mesh over groups that exist, one for each dimension.

        Parameters
        ----------
        group : ProcessGroup or sequence of ProcessGroup
            The group of each dimension; of one dimension, the group itself.
        device_type : str
            The device type of the arrays.
        mesh : array_like of int, optional
            The global ranks, which the groups have along their dimensions; one
            dimension needs none.
        mesh_dim_names : sequence of str, optional
            A name for each dimension.

        Raises
        ------
        TypeError, ValueError
            Groups and `mesh` do not fit.
        """
        _check_device(device_type)
        given = [group] if isinstance(group, ProcessGroup | NonGroupMember) else group
        groups = [resolve_group(one, "DeviceMesh.from_group") for one in given]
        if mesh is None:
            if len(groups) != 1:
                raise ValueError(
                    f"DeviceMesh.from_group: {len(groups)} groups without mesh; "
                    "expected the global ranks as an array"
                )
            mesh = groups[0].ranks
        ranks = _as_mesh(mesh)
        names = _as_names(mesh_dim_names, ranks.ndim)
        if len(groups) != ranks.ndim:
            raise ValueError(
                f"DeviceMesh.from_group: {len(groups)} groups for {ranks.ndim} "
                "dimensions of mesh; expected one for each"
            )
        for dim, one in enumerate(groups):
            along = _along(ranks, dim)
            if along is None or sorted(along) != sorted(one.ranks):
                raise ValueError(
                    f"DeviceMesh.from_group on rank {world.rank}: the group of "
                    f"dimension {dim} has {name_ranks(one.ranks)}, mesh "
                    f"{name_ranks(along or ())} there; expected the same"
                )
        return cls._made(device_type, ranks, names, groups, None)

    # -- its shape -----------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return int(self.mesh.ndim)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks, in all or along a dimension.

        Parameters
        ----------
        mesh_dim : int or str, optional
            The number or the name of a dimension; without it, all dimensions.

        Raises
        ------
        KeyError, IndexError
            As from `get_group`.

        Examples
        --------
        >>> dist.init_device_mesh("cpu", (1, 1)).size(0)
        1
        """
        if mesh_dim is None:
            return int(self.mesh.size)
        return self.shape[self._dim(mesh_dim, "size")]

    def get_rank(self) -> int:
        """Return this process's global rank."""
        assert world.rank is not None
        return world.rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return where this rank is in the mesh; ``None`` if it is not in it."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's rank in the group of a dimension; -1: not in the mesh.

        Parameters
        ----------
        mesh_dim : int or str, optional
            As for `get_group`.

        Raises
        ------
        KeyError, IndexError, RuntimeError
            As from `get_group`.

        Examples
        --------
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> mesh.get_local_rank("tp")
        0
        """
        group = self._group(mesh_dim, "get_local_rank")
        return -1 if isinstance(group, NonGroupMember) else group.rank()

    # -- its groups ----------------------------------------------------------

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the group of the ranks that differ from this one in `mesh_dim` alone.

        Parameters
        ----------
        mesh_dim : int or str, optional
            The number or the name of a dimension, or a name that `_flatten` gave. A
            mesh of one dimension needs none.

        Returns
        -------
        ProcessGroup
            The group; ``GroupMember.NON_GROUP_MEMBER`` on a rank that is not in the
            mesh.

        Raises
        ------
        KeyError, IndexError
            The mesh has no dimension of that name, or number.
        RuntimeError
            `mesh_dim` is missing, and the mesh has several dimensions.

        Examples
        --------
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> x = np.ones(2)
        >>> dist.all_reduce(x, group=mesh.get_group("dp"))
        """
        return self._group(mesh_dim, "get_group")  # type: ignore[return-value]

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the groups of this rank along all dimensions."""
        return [self.get_group(dim) for dim in range(self.ndim)]

    def _group(self, mesh_dim: int | str | None, method: str) -> _Group:
        if mesh_dim is None:
            if self.ndim > 1:
                raise RuntimeError(
                    f"DeviceMesh.{method}: the mesh has {self.ndim} dimensions; "
                    f"expected mesh_dim, {self._choice()}"
                )
            mesh_dim = 0
        flattened = self._top._flattened
        if isinstance(mesh_dim, str) and mesh_dim in flattened:
            return flattened[mesh_dim]._groups[0]
        return self._groups[self._dim(mesh_dim, method)]

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of some dimensions, by name, in the order given.

        It has the ranks whose place in the other dimensions is this rank's, and the
        groups of this mesh.

        Parameters
        ----------
        mesh_dim_names : str or tuple of str
            The names of dimensions, or a name that `_flatten` gave.

        Returns
        -------
        DeviceMesh
            The part; the mesh itself for all its names in order.

        Raises
        ------
        RuntimeError
            The mesh has no `mesh_dim_names`.
        KeyError
            A name is that of no dimension, or stands there twice.

        Examples
        --------
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> mesh["tp"].mesh_dim_names
        ('tp',)
        """
        if self.mesh_dim_names is None:
            raise RuntimeError("DeviceMesh: a mesh without mesh_dim_names has no parts")
        wanted = (
            (mesh_dim_names,)
            if isinstance(mesh_dim_names, str)
            else tuple(mesh_dim_names)
        )
        if wanted == self.mesh_dim_names:
            return self
        if len(wanted) == 1 and wanted[0] in self._top._flattened:
            return self._top._flattened[wanted[0]]
        dims = [self._dim(name, "__getitem__") for name in wanted]
        if not dims or len(set(dims)) < len(dims):
            raise KeyError(
                f"DeviceMesh: {wanted} names no dimension, or one twice; expected "
                f"some of {self.mesh_dim_names}"
            )
        # On a rank outside the mesh, one of those parts: it is in none of them.
        place = self._coordinate or (0,) * self.ndim
        others = tuple(slice(None) if d in dims else at for d, at in enumerate(place))
        # What is left has its dimensions in the order of this mesh.
        order = [sorted(dims).index(dim) for dim in dims]
        part = np.ascontiguousarray(self.mesh[others].transpose(order))
        groups = [self._groups[dim] for dim in dims]
        return self._made(self.device_type, part, wanted, groups, self._top)

    def _flatten(
        self, mesh_dim_name: str | None = None, backend_override: str | None = None
    ) -> DeviceMesh:
        """Return a mesh of one dimension with all ranks of this one, and a new group.

        Named `mesh_dim_name` (default: the names of the dimensions, with ``_`` between
        them), by which the mesh that this one is a part of finds it. Every rank calls
        this. torch has no public name for it either.
        """
        if mesh_dim_name is None:
            if self.mesh_dim_names is None:
                raise RuntimeError("DeviceMesh: a mesh without names needs one")
            mesh_dim_name = "_".join(self.mesh_dim_names)
        found = self._top._flattened.get(mesh_dim_name)
        if found is not None and np.array_equal(found.mesh, self.mesh.reshape(-1)):
            return found
        if found is not None or mesh_dim_name in (self._top.mesh_dim_names or ()):
            raise ValueError(
                f"DeviceMesh._flatten: {mesh_dim_name!r} is the name of another part "
                "of the mesh; expected a new one"
            )
        ranks = self.mesh.reshape(-1).copy()
        group = _new_group_along(ranks, 0, mesh_dim_name, backend_override)
        made = self._made(self.device_type, ranks, (mesh_dim_name,), [group], self._top)
        self._top._flattened[mesh_dim_name] = made
        return made

    @property
    def _top(self) -> DeviceMesh:
        return self if self._root is None else self._root

    def _dim(self, mesh_dim: int | str, method: str) -> int:
        if isinstance(mesh_dim, str):
            if mesh_dim not in (self.mesh_dim_names or ()):
                raise KeyError(
                    f"DeviceMesh.{method}: there is no dimension {mesh_dim!r}; "
                    f"expected {self._choice()}"
                )
            assert self.mesh_dim_names is not None
            return self.mesh_dim_names.index(mesh_dim)
        dim = as_int(mesh_dim, f"DeviceMesh.{method}: mesh_dim")
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(
                f"DeviceMesh.{method}: mesh_dim={dim}; expected {self._choice()}"
            )
        return dim % self.ndim

    def _choice(self) -> str:
        numbers = f"0 to {self.ndim - 1}"
        if self.mesh_dim_names is None:
            return numbers
        names = [*self.mesh_dim_names, *self._top._flattened]
        return f"{numbers} or {', '.join(map(repr, names))}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return (
            self.device_type,
            self.shape,
            tuple(_flat(self.mesh)),
            self.mesh_dim_names,
        )

    def __repr__(self) -> str:
        names = self.mesh_dim_names
        named = "" if names is None else f", mesh_dim_names={names}"
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}{named})"


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """Return the mesh of the first ranks of the world, in order, in this shape.

    Every rank calls this, with the same arguments.

    The semantics are those of ``torch.distributed.init_device_mesh``.

    Parameters
    ----------
    device_type : str
        The device type of the arrays, ``"cpu"`` or ``"cuda"``, without an index.
    mesh_shape : sequence of int
        The number of ranks along each dimension.
    mesh_dim_names : sequence of str, optional
        A name for each dimension.
    backend_override : dict, optional
        As of `DeviceMesh`.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong. No group was made.

    Examples
    --------
    >>> mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    >>> x = np.ones(2)
    >>> dist.all_reduce(x, group=mesh.get_group("dp"))
    >>> x
    array([1., 1.])
    """
    shape = tuple(as_ints(mesh_shape, "init_device_mesh: mesh_shape"))
    if not shape or min(shape) < 1:
        raise ValueError(
            f"init_device_mesh: mesh_shape={shape}; expected at least one dimension, "
            "and at least 1 rank along each"
        )
    return DeviceMesh(
        device_type,
        np.arange(int(np.prod(shape))).reshape(shape),
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
    )


def _new_group_along(
    ranks: Any, dim: int, name: str | None, backend: str | None
) -> _Group:
    along = _along(ranks, dim)
    if along is None:
        return NON_GROUP_MEMBER
    default = world.get_group(DEFAULT)
    if name is None and backend is None and sorted(along) == default.ranks:
        return default
    return new_group(along, backend=backend, group_desc=name)


def _along(ranks: Any, dim: int) -> list[int] | None:
    """Return the ranks that differ from this one in dimension `dim` alone."""
    here = np.argwhere(ranks == world.rank)
    if not len(here):
        return None
    place = tuple(slice(None) if d == dim else at for d, at in enumerate(here[0]))
    return [int(rank) for rank in ranks[place]]


def _flat(ranks: Any) -> list[int]:
    return [int(rank) for rank in ranks.reshape(-1)]


def _check_device(device_type: str) -> None:
    """Raise `ValueError` unless `device_type` is a device type, without an index."""
    if not isinstance(device_type, str) or not is_device_type(device_type):
        raise ValueError(
            f"DeviceMesh: device_type={device_type!r}; expected a device type without "
            "an index, such as 'cpu' or 'cuda'"
        )


def _as_mesh(mesh: Any) -> Any:
    """Return `mesh` as an array of integers, each once; `TypeError` or `ValueError`."""
    ranks = np.array(mesh)
    if ranks.dtype.kind not in "iu":
        raise TypeError(
            f"DeviceMesh: mesh has dtype {ranks.dtype}; expected an array of integers, "
            "the global ranks"
        )
    if not ranks.ndim or not ranks.size or len(np.unique(ranks)) < ranks.size:
        raise ValueError(
            f"DeviceMesh: mesh={ranks.tolist()}; expected at least one dimension and "
            "one rank, and each rank once"
        )
    return ranks


def _as_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    """Return the names of `ndim` dimensions, all different; `ValueError` otherwise."""
    if names is None:
        return None
    given = (names,) if isinstance(names, str) else tuple(names)
    if len(given) != ndim or len(set(given)) < ndim or not all(given):
        raise ValueError(
            f"DeviceMesh: mesh_dim_names={given}; expected {ndim} different names, one "
            "for each dimension"
        )
    return given


def _as_backends(
    override: Mapping[int | str, Any] | None, ndim: int, names: tuple[str, ...] | None
) -> list[str | None]:
    """Return the backend string that `override` has for each dimension, or ``None``."""
    backends: list[str | None] = [None] * ndim
    for key, value in (override or {}).items():
        known = [*range(ndim), *(names or ())]
        if key not in known:
            raise ValueError(
                f"DeviceMesh: backend_override has {key!r}; expected one of {known}"
            )
        dim = names.index(key) if isinstance(key, str) and names else as_int(key, "key")
        backend = value[0] if isinstance(value, tuple) else value
        if not isinstance(backend, str):
            raise TypeError(
                f"DeviceMesh: backend_override[{key!r}] is {value!r}; expected a "
                "backend string, or a pair of it and options"
            )
        backends[dim] = backend
    return backends
