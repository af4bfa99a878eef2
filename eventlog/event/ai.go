package event

import "time"

// AIResponded says that the bot has answered, and what it cost. The consumer
// ai-response-worker emits it.
type AIResponded struct {
	ConversationID string `json:"conversation_id" jsonschema:"format=uuid"`
	MessageID      string `json:"message_id"`
	Model          string `json:"model"`
	TokensIn       int64  `json:"tokens_in"`
	TokensOut      int64  `json:"tokens_out"`
	CostCents      int64  `json:"cost_cents"`
	LatencyMS      int64  `json:"latency_ms"`
}

func (AIResponded) EventType() string { return "ai.responded" }

// AIHandoffTriggered says that a person has to take over from the bot. The
// consumer ai-response-worker emits it.
type AIHandoffTriggered struct {
	ConversationID string `json:"conversation_id" jsonschema:"format=uuid"`
	Reason         string `json:"reason"`
	From           string `json:"from" jsonschema:"enum=bot"`
	ToUserID       string `json:"to_user_id,omitempty" jsonschema:"format=uuid"`
}

func (AIHandoffTriggered) EventType() string { return "ai.handoff_triggered" }

// AISentimentAlert says that somebody is unhappy. The consumer
// ai-sentiment-worker emits it.
type AISentimentAlert struct {
	ConversationID string  `json:"conversation_id" jsonschema:"format=uuid"`
	Sentiment      string  `json:"sentiment" jsonschema:"enum=angry,enum=frustrated"`
	Score          float64 `json:"score"`
}

func (AISentimentAlert) EventType() string { return "ai.sentiment_alert" }

// AIBudgetWarning says that the day's budget will soon be used up. The
// consumer ai-response-worker emits it.
type AIBudgetWarning struct {
	PctUsed          float64 `json:"pct_used"`
	DailyBudgetCents int64   `json:"daily_budget_cents"`
	CurrentCents     int64   `json:"current_cents"`
}

func (AIBudgetWarning) EventType() string { return "ai.budget_warning" }

// AIBudgetThrottled says that the day's budget is used up and the bot is
// silent until a time. The consumer ai-response-worker emits it.
type AIBudgetThrottled struct {
	DailyBudgetCents int64     `json:"daily_budget_cents"`
	CurrentCents     int64     `json:"current_cents"`
	ThrottleUntil    time.Time `json:"throttle_until"`
}

func (AIBudgetThrottled) EventType() string { return "ai.budget_throttled" }

// AIBudgetSnapshot says what a day has used of its budget. The cron
// daily-budget-reset emits it, once a day for each organization.
type AIBudgetSnapshot struct {
	// Day is the day that has ended, such as 2026-12-01, in the zone America/Sao_Paulo.
	Day              string `json:"day" jsonschema:"format=date"`
	DailyBudgetCents int64  `json:"daily_budget_cents"`
	UsedCents        int64  `json:"used_cents"`
}

func (AIBudgetSnapshot) EventType() string { return "ai.budget_snapshot" }
