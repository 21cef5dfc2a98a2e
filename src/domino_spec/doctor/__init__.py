"""The doctor: a target, a drafter and a machine before anything runs, read and measured."""
