"""The engine: every run is a fleet, of one or of hundreds.

draws (randomness as a function of place) → stack (one architecture, many members) → batches (data of a fleet) → fleet (the step) →
learner (the loop over tasks), checkpoint.
"""
