"""Figures drawn from the record of an experiment, one module per kind; `report.experiment_plots` chooses among them.

Each module has one function: a record in, caption → matplotlib figure out. They use `report.drawing`, `report.records` and
`report.wording`, and are imported by `report.experiment_plots` only.
"""
