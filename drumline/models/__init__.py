"""Turns the config of a model into a model, and a trained model into files.

It reads configs and files, builds the model on the meta device, and fills each rank's shards with
weights. It injects adapters, computes attention and losses by documents, and exports what a run has
trained. The engine builds and runs models by it, the planner counts their sizes, and the command
line exports them.
"""
