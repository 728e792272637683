"""Performance model: hardware targets and what is predicted from them."""
