"""Proof on the user's own work: does a strategy train what one process would?"""
