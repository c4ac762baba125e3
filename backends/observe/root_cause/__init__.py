"""Root cause: why a job hangs, over all of its groups at once.

`find_root_causes` is a pure function of `Evidence`. Its rules, in this order:

1. ranks issued one op differently: the mismatch is the cause;
2. a rank has not completed what its peers have completed, and it waits for nobody that
   is absent: its GPU or its process has stopped;
3. else those for whom others wait and who wait for nobody themselves, over all groups,
   sends and receives included;
4. ranks that wait for each other are told as one cycle;
5. all ranks are in an op and nothing differs: it hangs in its execution.

What else waits is a consequence of that. A wrong culprit is worse than none: where what
is known does not decide, the verdict is `Fault.UNDECIDED` and names nobody.
"""

from __future__ import annotations

from ..evidence import Evidence
from ..verdicts import Verdict
from .causes import find_causes
from .differences import completed_differences
from .picture import Picture
from .scene import scenes_of
from .wording import undecided, verdict_of, verdict_on_difference

__all__ = ["STALL", "find_completed_differences", "find_root_causes"]


#: Seconds: an op that is younger hangs on no account.
STALL = 2.0


def find_root_causes(evidence: Evidence, stall: float = STALL) -> list[Verdict]:
    """Return why the job hangs, the cause that explains most first.

    Each verdict is a cause: there are several only if they are independent of each
    other, and none if no op is known to hang, in flight for `stall` seconds.
    """
    picture = Picture.of(evidence, stall)
    causes = find_causes(picture)
    if not causes:
        waits = picture.waits or picture.doubtful
        return [undecided(waits, picture)] if waits else []
    return [verdict_of(cause, picture, causes) for cause in causes]


def find_completed_differences(evidence: Evidence) -> list[Verdict]:
    """Return verdicts on completed collectives whose dtype or reduction differed."""
    picture = Picture(evidence, scenes_of(evidence), frozenset())
    return [
        verdict_on_difference(one, picture)
        for scene in picture.scenes
        for one in completed_differences(scene)
    ]
