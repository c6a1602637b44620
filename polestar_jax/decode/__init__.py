"""The jitted decode loop and the policies it is steered by."""
