"""How long calls that may block are waited for."""

__all__ = [
    "ABORT_EACH",
    "ABORT_WAIT",
    "CLOSE_WAIT",
    "MUTEX_WAIT",
    "REVOKE_WAIT",
    "STORE_WAIT",
]

#: Seconds that an abort, and an orderly end, may take before the caller goes on.
ABORT_WAIT = 0.8
CLOSE_WAIT = 5.0
#: Seconds after which an abort counts as stuck, for each communicator of the device
#: that is being aborted: ncclCommAbort takes up to 1 s, and the driver does parts of
#: several aborts one after the other.
ABORT_EACH = 2.0
#: Seconds for which an abort waits for the mutex of a communicator, whose holder
#: may be stuck in the very call that the abort is to end.
MUTEX_WAIT = 0.2
#: Seconds that the kernels of a communicator get to end after ncclCommRevoke; then
#: the communicator is aborted as if there were no ncclCommRevoke.
REVOKE_WAIT = 0.5
#: Seconds for which the store is asked which ranks are missing.
STORE_WAIT = 1.0
