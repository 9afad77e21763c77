"""Which preserver and sparsifier to use: the best measured ones for a case, from a table of recorded results.

    cases.py         the cases that were measured: what tasks share, how many there are, on which data
    table.py         `measured.json`, which `python docs/recommended.py` makes from the records under results/
    recommending.py  `recommend`: the row of the table with the highest average that the case allows

Nothing is computed here but a maximum. A case that was not measured is an error that names the nearest one.

Imports preserve, sparsify and terms. Imported by keeper and runner.
"""

from selfless.recommendation.cases import CASES, Case
from selfless.recommendation.recommending import NAME, NotMeasured, Recommendation, recommend, recommend_for_stream
from selfless.recommendation.table import Measured

__all__ = ["CASES", "NAME", "Case", "Measured", "NotMeasured", "Recommendation", "recommend", "recommend_for_stream"]
