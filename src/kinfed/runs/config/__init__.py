"""From a config's text to objects: experiments, parts and plugins."""
