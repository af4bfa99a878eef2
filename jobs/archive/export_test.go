package archive

// SetPartRows is for tests that must see several parts. Call it before Run.
func (a *Archive) SetPartRows(rows int) { a.partRows = rows }
