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
from .picture import Picture
from .wording import undecided, verdict_of

__all__ = ["find_root_causes"]


def find_root_causes(evidence: Evidence) -> list[Verdict]:
    """Return why the job hangs, the cause that explains most first.

    Parameters
    ----------
    evidence
        What is known of the job; see `rankscope.backends.observe.evidence`.

    Returns
    -------
    list of Verdict
        One for each cause: several only if they are independent of each other. Empty
        if no op is known to hang.
    """
    picture = Picture.of(evidence)
    causes = find_causes(picture)
    if not causes:
        return [undecided(picture)] if picture.waits else []
    told = {wait.place for cause in causes for wait in cause.waits[:1]}
    return [
        verdict_of(cause, picture, told, first=number == 0)
        for number, cause in enumerate(causes)
    ]
