"""NON_GROUP_MEMBER: what `new_group` returns on a rank outside the new group."""

from __future__ import annotations

__all__ = ["NON_GROUP_MEMBER", "NonGroupMember"]


class NonGroupMember:
    """The type of ``GroupMember.NON_GROUP_MEMBER``, its only instance.

    `new_group` returns that object on a rank that is not in the new group, so that
    ``is`` and ``==`` find it, after a pickle and a copy too. It is false.

    Notes
    -----
    In ``torch.distributed`` it is an instance of ``object``.

    Examples
    --------
    >>> bool(dist.GroupMember.NON_GROUP_MEMBER)
    False
    """

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "NON_GROUP_MEMBER"

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


NON_GROUP_MEMBER = NonGroupMember()
