"""All uses of torch's private interfaces."""
