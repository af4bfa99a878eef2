package event

import "time"

// NuvemshopOrderCreated says that somebody has ordered. The application emits it.
type NuvemshopOrderCreated struct {
	OrderID    string `json:"order_id" jsonschema:"format=uuid"`
	NSOrderID  int64  `json:"ns_order_id"`
	ContactID  string `json:"contact_id,omitempty" jsonschema:"format=uuid"`
	TotalCents int64  `json:"total_cents"`
}

func (NuvemshopOrderCreated) EventType() string { return "nuvemshop.order_created" }

// NuvemshopOrderPaid says that an order is paid. The application emits it.
type NuvemshopOrderPaid struct {
	OrderID     string    `json:"order_id" jsonschema:"format=uuid"`
	PaidAt      time.Time `json:"paid_at"`
	AmountCents int64     `json:"amount_cents"`
}

func (NuvemshopOrderPaid) EventType() string { return "nuvemshop.order_paid" }

// NuvemshopOrderCancelled says that an order is off. The application emits it.
type NuvemshopOrderCancelled struct {
	OrderID     string    `json:"order_id" jsonschema:"format=uuid"`
	CancelledAt time.Time `json:"cancelled_at"`
	Reason      string    `json:"reason,omitempty"`
}

func (NuvemshopOrderCancelled) EventType() string { return "nuvemshop.order_cancelled" }

// NuvemshopOrderFulfilled says that an order is on its way. The application
// emits it.
type NuvemshopOrderFulfilled struct {
	OrderID     string    `json:"order_id" jsonschema:"format=uuid"`
	FulfilledAt time.Time `json:"fulfilled_at"`
	Tracking    string    `json:"tracking,omitempty"`
}

func (NuvemshopOrderFulfilled) EventType() string { return "nuvemshop.order_fulfilled" }

// NuvemshopCartAbandoned says that somebody has left without ordering. The
// application emits it.
type NuvemshopCartAbandoned struct {
	CartID      string    `json:"cart_id" jsonschema:"format=uuid"`
	ContactID   string    `json:"contact_id,omitempty" jsonschema:"format=uuid"`
	ValueCents  int64     `json:"value_cents"`
	AbandonedAt time.Time `json:"abandoned_at"`
}

func (NuvemshopCartAbandoned) EventType() string { return "nuvemshop.cart_abandoned" }

// NuvemshopCustomerRedactReceived says that Nuvemshop asks for a customer's
// data to be removed. The application emits it.
type NuvemshopCustomerRedactReceived struct {
	NSCustomerID int64  `json:"ns_customer_id"`
	NSRequestID  string `json:"ns_request_id"`
}

func (NuvemshopCustomerRedactReceived) EventType() string {
	return "nuvemshop.customer_redact_received"
}

// NuvemshopProductSynced says that a product has changed. The consumer
// nuvemshop-sync-worker emits it.
type NuvemshopProductSynced struct {
	ProductID string `json:"product_id" jsonschema:"format=uuid"`
	Action    string `json:"action" jsonschema:"enum=created,enum=updated,enum=deleted"`
}

func (NuvemshopProductSynced) EventType() string { return "nuvemshop.product_synced" }

// NuvemshopFullResync asks for everything to be read anew from the store. An
// operator emits it.
type NuvemshopFullResync struct {
	// Since leaves out what has not changed after it.
	Since time.Time `json:"since,omitzero"`
}

func (NuvemshopFullResync) EventType() string { return "nuvemshop.full_resync" }
