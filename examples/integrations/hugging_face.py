"""A script for Hugging Face's Trainer, as it runs under python and torchrun, with two lines of Paceline's.

paceline run -n 2 examples/integrations/hugging_face.py
"""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from paceline.integrations.transformers import PacelineCallback  # one


def main():
    set_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    )
    texts = torch.randint(1, 64, (512, 12))
    labels = (texts[:, 0] < 32).long()
    rows = [{"input_ids": text, "labels": label} for text, label in zip(texts, labels, strict=True)]
    arguments = TrainingArguments(
        "bert-output",
        num_train_epochs=3,
        learning_rate=3e-3,
        per_device_train_batch_size=16,
        logging_steps=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows[:448],
        eval_dataset=rows[448:],
        compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
    )
    PacelineCallback().attach(trainer)  # two
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        print(f"accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
