"""The eight object sets of table 2: Flowers, Scenes, Birds, Cars, Aircraft, Actions, Letters, SVHN.

Bottom up: matlab, shelf (files, loose or in archives) → listing → a reader a set → published (the eight) → fitting, preparing (one memory
map a set) → finding (where, fetch, verify) → stream.
"""
