"""One module for each framework. Only this module imports the framework."""
