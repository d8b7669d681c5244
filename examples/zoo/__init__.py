"""Data sets and models of the experiments, which the installed package has as `dadplug.examples.zoo`.

Programs find them by name, with `dadplug.data.load_dataset` and `dadplug.models.build_model`. A module here imports
nothing of dadplug but its errors.
"""
