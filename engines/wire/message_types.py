"""The types of Rankscope's own messages on ipyparallel's sockets."""

__all__ = ["CELL_VALUE", "DATA", "ERROR", "REPLY", "REQUEST", "STATUS", "SUBSCRIPTION"]

#: On the control channel: a request to an agent (`wire.requests`), and its answer.
REQUEST = "rankscope_request"
REPLY = "rankscope_reply"
#: On iopub: a rank's status, under the header of a subscription.
STATUS = "rankscope_status"
SUBSCRIPTION = "rankscope_subscription"
#: On iopub, under the header of a cell: the details of the error that ended the cell
#: (`errors.pack_details`) with the rank's status since then, and data of the cell that
#: is no output of it.
ERROR = "rankscope_error"
DATA = "rankscope_data"

#: The variable of a rank with the value of the last cell that was to be kept.
CELL_VALUE = "_rankscope_cell_value"
