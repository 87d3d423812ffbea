"""Waiting for a page in a browser."""


def until(page, expression, *, seconds=30):
    """The value of a JavaScript expression, once it is true.

    `page.wait_for_function` would evaluate it inside the page, which the page's security policy forbids.
    """
    for _ in range(10 * seconds):
        if value := page.evaluate(expression):
            return value
        page.wait_for_timeout(100)
    raise AssertionError(f"not true after {seconds} s: {expression}")
