"""Graph passes from a front end's graph to the decoder contract, one a file.

Each file has `apply(model, ..) -> Outcome`: it changes the model in place and says whether it did, and if not, why.
"""
