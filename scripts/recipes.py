"""Plan all recipes, and write what the planner predicts into the head of each file.

python -m scripts.recipes
"""

from __future__ import annotations

from drumline.planner.recipes import all_recipes, predict, with_prediction


def main() -> None:
    """Write the predictions of all recipes."""
    for recipe in all_recipes():
        text = recipe.path.read_text()
        predicted = with_prediction(text, predict(recipe.path))
        if predicted != text:
            recipe.path.write_text(predicted)
            print(f"wrote {recipe.name}")


if __name__ == "__main__":
    main()
