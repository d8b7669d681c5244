"""The command nnUNetv2_train, for the trainers of `tiny_trainers`."""

if __name__ == "__main__":
    import nnunetv2.run.run_training as command
    import tiny_trainers

    command.recursive_find_trainer_class_by_name = lambda name: getattr(tiny_trainers, name)
    command.run_training_entry()
