"""What ``make`` runs beside the tests."""

import sys

# Where nbformat and Jupyter's servers import jsonschema, this checker of IRIs parses 38
# grammars at its import: 1.3 s of CPU in each process, and 3 on a busy machine.
# jsonschema goes without it, and no notebook has an IRI.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
